"""Lines of the sparse experiments, arranged by the way weights were removed, and how figures are told; gaps allowed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from narrow_lines import Row
from narrow_tables import T_95, signed

DRAWS = (0, 1, 2)
REMOVED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
JUDGED = (0.8, 0.9)
STAGES = (1, 5, 20)
COLUMNS = {
    "Weight": "magnitude",
    "Taylor": "taylor",
    "OBD": "obd-fisher",
    "OBA": "oba",
    "OBA hessian": "oba-hessian",
    "OBA ggn": "oba-ggn",
}
NAMES = {criterion: name for name, criterion in COLUMNS.items()}
FORMS = {"max+w": "max + |θ|", "max": "max", "none": "plain", "l2+w": "l2 + |θ|"}
PAPER = "max+w"
POLICIES = {
    "frozen": "norms frozen",
    "re-estimate": "norms measured anew after every stage",
    "late": "norms measured once, at the end",
}
LARGE_POLICIES = ("frozen", "re-estimate")
SHORT = {"frozen": "frozen", "re-estimate": "every stage", "late": "at the end"}
STAGED = ("taylor", "oba", "oba-hessian", "oba-ggn")
BAR = r"\|"


@dataclass(frozen=True)
class Way:
    """One way to rank, in so many stages, under one policy."""

    criterion: str
    form: str
    stages: int
    policy: str

    @property
    def name(self) -> str:
        many = "" if self.ranks_stay else f", {counted(self.stages, 'stage')}"
        return f"{NAMES[self.criterion]}, {FORMS[self.form]}{many}"

    @property
    def ranks_stay(self) -> bool:
        """Magnitudes rank what is left as they ranked it before, also after division by the largest."""
        return self.criterion == "magnitude" and self.form in ("none", "max", "max+w")


class Narrow:
    """Lines of the narrow network; accuracies in %, by draw."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = [row for row in rows if row["criterion"] != "dense"]
        self.dense = {int(row["draw"]): row for row in rows if row["criterion"] == "dense"}
        assert self.dense, "the dense network is not among the lines"
        self.held: dict[tuple[Any, ...], dict[int, Row]] = defaultdict(dict)
        for row in self.rows:
            key = (row["criterion"], form_of(row), int(row["stages"]), row["policy"])
            self.held[*key, row["removed"]][int(row["draw"])] = row

    @property
    def accuracy(self) -> float:
        """Of the dense network on images 5,000–9,999."""
        return 100 * next(iter(self.dense.values()))["report"]

    def values(self, way: Way, removed: float, half: str = "report") -> dict[int, float]:
        stages = 1 if way.ranks_stay else way.stages
        late = way.policy == "late" or (way.policy == "re-estimate" and stages == 1)
        policy, column = ("frozen", f"late_{half}") if late else (way.policy, half)
        found = self.held.get((way.criterion, way.form, stages, policy, removed), {})
        return {draw: 100 * row[column] for draw, row in sorted(found.items())}

    def choice(self, way: Way, removed: float) -> float:
        return mean(self.values(way, removed, "choose").values())

    def at(self, way: Way, removed: float) -> str:
        return told(self.values(way, removed))

    def measured(self, ways: list[Way], removed: float) -> list[Way]:
        """Those with most draws: ways are compared on the same number of them."""
        num = max(len(self.values(way, removed)) for way in ways)
        return [way for way in ways if num and len(self.values(way, removed)) == num]

    def best(self, ways: list[Way], removed: float) -> Way | None:
        """The best on images 0–4,999 of those with most draws; the first of equals."""
        ways = self.measured(ways, removed)
        return max(ways, key=lambda way: self.choice(way, removed), default=None)

    def gap(self, way: Way, other: Way, removed: float) -> list[float]:
        """What one has more than the other, on the draws that both have."""
        one, two = self.values(way, removed), self.values(other, removed)
        return [one[draw] - two[draw] for draw in one if draw in two]

    def seconds(self, criterion: str, stages: int, policy: str) -> list[float]:
        found = [
            [row["seconds"] for row in own.values()]
            for key, own in self.held.items()
            if (key[0], key[2], key[3]) == (criterion, stages, policy)
        ]
        return [value for own in found for value in own]


class Choices:
    """Every form of ranking: accuracy (%) on images 0–4,999, draw 0."""

    SHARES = (0.5, 0.8, 0.9)
    FORMS = ("none", "none+w", "max", "max+w", "l2", "l2+w", "mean", "mean+w")

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.held: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            key = (row["criterion"], form_of(row), int(row["stages"]), row["policy"])
            self.held[*key, row["removed"]] = row
        self.criteria = list(dict.fromkeys(row["criterion"] for row in rows))

    def values(self, criterion: str, form: str, stages: int, policy: str) -> list[float | None]:
        if criterion == "magnitude" and form == "none+w":
            form = "none"  # the same ranks
        held, column = ("frozen", "late_choose") if policy == "late" else (policy, "choose")
        rows = [self.held.get((criterion, form, stages, held, share)) for share in self.SHARES]
        return [None if row is None else 100 * row[column] for row in rows]


class Large:
    """Lines of ResNet50; accuracies in %, by draw."""

    def __init__(self, rows: list[Row]) -> None:
        assert not any(row["failure"] for row in rows), "a network was refused"
        self.dense = 100 * next(row["accuracy"] for row in rows if row["criterion"] == "dense")
        self.rows = [row for row in rows if row["criterion"] != "dense"]
        self.removed = sorted({row["removed"] for row in self.rows})
        self.held: dict[tuple[Any, ...], dict[int, Row]] = defaultdict(dict)
        for row in self.rows:
            key = (row["criterion"], row["saliency"], int(row["stages"]), row["batch_norm"])
            self.held[*key, row["removed"]][int(row["draw"])] = row

    def values(self, way: Way, removed: float, what: str = "accuracy") -> dict[int, float]:
        """Magnitudes in one stage stand for all, and their first draw for all where norms are frozen."""
        saliency = {"max+w": "paper", "none": "plain"}[way.form]
        stages = 1 if way.ranks_stay else way.stages
        found = self.held.get((way.criterion, saliency, stages, way.policy, removed), {})
        factor = 100 if what == "accuracy" else 1
        return {draw: factor * row[what] for draw, row in sorted(found.items())}

    def best(self, ways: list[Way], removed: float) -> Way | None:
        num = max(len(self.values(way, removed)) for way in ways)
        ways = [way for way in ways if num and len(self.values(way, removed)) == num]
        return max(ways, key=lambda way: mean(self.values(way, removed).values()), default=None)


def form_of(row: Row) -> str:
    return f"{row['normalise']}{'+w' if row['magnitude'] else ''}"


# -- ways and text ----------------------------------------------------------------------------------------------------


def staged(criterion: str, form: str, policy: str) -> list[Way]:
    ways = [Way(criterion, form, stages, policy) for stages in STAGES]
    return ways[:1] if ways[0].ranks_stay else ways


def paper_form(criterion: str) -> str:
    return "none" if criterion == "magnitude" else PAPER


def large_ways(policy: str) -> list[Way]:
    weights = [Way("magnitude", form, 1, policy) for form in ("none", PAPER)]
    return weights + [
        Way("oba", form, stages, policy) for form in (PAPER, "none") for stages in STAGES
    ]


def every(criterion: str, policy: str) -> list[Way]:
    return [way for form in FORMS for way in staged(criterion, form, policy)]


def head(names: Iterable[str]) -> Iterator[str]:
    names = list(names)
    yield line(names)
    yield "|" + "---|" * len(names)


def line(cells: Iterable[str]) -> str:
    """A row of a table; bars of absolute values do not end a cell."""
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def spread(values: list[float]) -> str:
    sd = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{sd}"


def told(values: dict[int, float], usual: int = len(DRAWS)) -> str:
    if not values:
        return "–"
    return spread(list(values.values())) + (f" (n {len(values)})" if len(values) != usual else "")


def margin_told(gaps: list[float], unit: str = "") -> str:
    if not gaps:
        return "–"
    sd = f" ± {stdev(gaps):.1f}" if len(gaps) > 1 else ""
    found = f"{signed(mean(gaps))}{sd}{unit}"
    if len(gaps) != len(DRAWS):
        return f"{found} (n {len(gaps)})"
    return f"{found} (within noise)" if abs(mean(gaps)) < T_95 * stdev(gaps) else found


def bold(text: str, wanted: bool) -> str:
    return f"**{text}**" if wanted and text != "–" else text


def counted(number: int, what: str) -> str:
    return f"{'one' if number == 1 else number} {what}{'' if number == 1 else 's'}"
