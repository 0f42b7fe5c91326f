"""The page of the sparse narrow ResNet20. Every number in it is computed from the lines."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from narrow_tables import T_95, signed
from sparse_ways import (
    COLUMNS,
    DRAWS,
    FORMS,
    JUDGED,
    NAMES,
    PAPER,
    POLICIES,
    REMOVED,
    SHORT,
    STAGED,
    STAGES,
    Choices,
    Narrow,
    Way,
    bold,
    counted,
    every,
    form_of,
    head,
    line,
    margin_told,
    paper_form,
    spread,
    staged,
    told,
)


def narrow_page(narrow: Narrow, choices: Choices, about: dict[str, Any]) -> Iterator[str]:
    yield "# Which single weights can the public narrow ResNet20 do without? CIFAR-10, no training"
    yield ""
    yield "```"
    yield from Path(__file__).with_name("runs").joinpath("sparse.sh").read_text().splitlines()
    yield "```"
    yield ""
    for own in about["lines"]:
        yield f"- {own['what']}: {own['device']}; torch {own['torch']}; commit {own['commits']}."
    yield ""
    again = mean(100 * row["late_report"] for row in narrow.dense.values())
    yield (
        f"One global threshold over all weights of convolutions and the linear layer. {len(narrow.rows):,} networks "
        f"of reported ways and {len(choices.rows):,} of the grid of forms. Scores and norms see draws of 2,000 "
        "training images (0, 1, 2: rows of the permutation of seed 0). Choices are made on test images 0–4,999, "
        f"figures are those on 5,000–9,999, where the dense network has **{narrow.accuracy:.2f} %** "
        f"({again:.2f} % with its norms measured anew on a draw, mean of {len(narrow.dense)}). Mean ± s.d. over "
        "draws; n is 3 unless a cell says otherwise; – is not measured. Stages: with T of them, stage t leaves "
        "k^(t/T) of the weights when k are to stay, and scores are taken anew at each."
    )
    yield ""
    yield (
        "Forms: *plain* |s|; *max* |s| divided by the tensor's largest; *max + |θ|*, the paper's, adds the magnitude "
        "of the weight; *l2 + |θ|* likewise with the tensor's norm. Norms: *frozen*, as they were trained; *after "
        "every stage*, measured anew on the draw, the last time after the last stage; *once, at the end*, scored and "
        "removed as frozen, then measured. In one stage the last two are the same. Weight is |θ|, plain unless said: "
        "neither stages nor, where norms are frozen, draws change it (with max the order stays too). OBD is ½ θ² "
        f"times the Fisher diagonal. {_functional(choices)}"
    )
    yield ""
    yield "![accuracy against the share removed](sparse_resnet20.png)"
    yield from _main_tables(narrow)
    yield from _winners(narrow)
    yield from _judged_tables(narrow)
    yield from _staged_table(narrow)
    yield from _cost(narrow)
    yield from _choice_tables(choices)
    yield from _sparsity(narrow, choices)
    yield ""
    yield "## What the lines show"
    yield ""
    for sentence in _reading(narrow, choices):
        yield f"- {sentence}"
    yield from _missing(narrow)


def _functional(choices: Choices) -> str:
    """OBA is of one kind here: the curvature of products and that of the network alone agree."""
    ours, same = 0, 0
    for key, row in choices.held.items():
        other = choices.held.get(("oba-functional", *key[1:]))
        if key[0] == "oba" and other is not None:
            ours += 1
            same += all(
                row[name] == other[name] for name in row if name not in ("criterion", "seconds")
            )
    if not ours:
        return "OBA is θ ⊙ Hθ with the paper's products (`connectivity`)."
    return (
        "OBA is θ ⊙ Hθ with the paper's products (`connectivity`); here that is the curvature of the network alone "
        f"(`functional`): {same} of {ours} networks have the same figures by both, so one column stands for both."
    )


def _main_tables(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield "## The paper's form"
    yield ""
    yield (
        "max + |θ| (Weight: plain). Accuracy (%) on images 5,000–9,999, then its ratio to the dense network's and the "
        "number of stages, 1, 5 or 20: that which has the best accuracy on images 0–4,999 at this share, among those "
        "with most draws measured. In bold: the best of the row by images 0–4,999, of those with most draws."
    )
    for policy, title in POLICIES.items():
        yield ""
        yield f"### {title[0].upper()}{title[1:]}"
        yield ""
        yield from head(["removed", *COLUMNS])
        for removed in REMOVED:
            chosen = [
                narrow.best(staged(criterion, paper_form(criterion), policy), removed)
                for criterion in COLUMNS.values()
            ]
            first = narrow.best([way for way in chosen if way], removed) if any(chosen) else None
            yield line(
                [
                    f"{removed:g}",
                    *(bold(_main_cell(narrow, way, removed), way == first) for way in chosen),
                ]
            )


def _main_cell(narrow: Narrow, way: Way | None, removed: float) -> str:
    if way is None:
        return "–"
    values = narrow.values(way, removed)
    ratio = f"{mean(values.values()) / narrow.accuracy:.2f}"
    return f"{told(values)} ({ratio}{'' if way.ranks_stay else f'; {way.stages}'})"


def _judged_tables(narrow: Narrow) -> Iterator[str]:
    for removed in JUDGED:
        yield ""
        yield f"## Stages, forms and norms at {removed:g}"
        yield ""
        yield "Accuracy (%) on images 5,000–9,999. Rows that nobody measured are left out."
        yield ""
        yield from head(["norms", "form", "stages", *COLUMNS])
        for policy, form, stages in itertools.product(POLICIES, FORMS, STAGES):
            ways = [Way(criterion, form, stages, policy) for criterion in COLUMNS.values()]
            new = [way for way in ways if not way.ranks_stay or stages == 1]
            if not any(narrow.values(way, removed) for way in new):
                continue
            if stages == 1 and policy == "late":
                continue  # told above, among those of every stage
            both = ", at the end" if stages == 1 and policy == "re-estimate" else ""
            yield line(
                [
                    SHORT[policy] + both,
                    FORMS[form],
                    str(stages),
                    *(narrow.at(way, removed) for way in ways),
                ]
            )


def _winners(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield f"## What wins at {JUDGED[0]:g} and {JUDGED[1]:g}, by how much, at what cost"
    yield ""
    yield (
        "Form and stages of each criterion are those with the best accuracy on images 0–4,999 (*choice*), among ways "
        "with all three draws; rows are sorted by it. *Margin*: over Weight, plain, under the same policy, in points "
        f"on images 5,000–9,999, paired over draws; *within noise*: below {T_95:.1f} s.d. (t-test, 95 %, not corrected "
        "for many comparisons). *Seconds*: of one network, mean of all lines of this criterion, stages and policy; "
        "*readings*: how often the 2,000 images are read, to score and for the norms. *Fewer draws*: the best way that "
        "is higher on the choice half of the draws it has, and is not in the race yet."
    )
    for removed, policy in itertools.product(JUDGED, POLICIES):
        yield ""
        yield f"### {removed:g}, {POLICIES[policy]}"
        yield ""
        yield from head(
            ["criterion", "form", "stages", "choice", "report", "ratio", "margin", "seconds"]
            + ["readings", "fewer draws"]
        )
        for way in ranked(narrow, removed, policy):
            yield line(_winner_cells(narrow, way, removed))
    yield from _paper_margins(narrow)


def ranked(narrow: Narrow, removed: float, policy: str) -> list[Way]:
    """The best way of each criterion with three draws, best first on the choice half."""
    found: list[Way] = []
    for criterion in COLUMNS.values():
        complete = [
            way
            for way in every(criterion, policy)
            if len(narrow.values(way, removed)) == len(DRAWS)
        ]
        if complete:
            found.append(max(complete, key=lambda way: narrow.choice(way, removed)))
    return sorted(found, key=lambda way: -narrow.choice(way, removed))


def _winner_cells(narrow: Narrow, way: Way, removed: float) -> list[str]:
    weight = Way("magnitude", "none", 1, way.policy)
    margin = "" if way == weight else margin_told(narrow.gap(way, weight, removed))
    stages = 1 if way.ranks_stay else way.stages
    seconds = narrow.seconds(way.criterion, stages, held_under(way.policy, stages))
    values = narrow.values(way, removed)
    higher = [
        other
        for other in every(way.criterion, way.policy)
        if 0 < len(narrow.values(other, removed)) < len(DRAWS)
        and narrow.choice(other, removed) > _same_draws(narrow, way, other, removed)
    ]
    few = max(higher, key=lambda other: narrow.choice(other, removed), default=None)
    return [
        NAMES[way.criterion],
        FORMS[way.form],
        str(stages),
        f"{narrow.choice(way, removed):.1f}",
        told(values),
        f"{mean(values.values()) / narrow.accuracy:.2f}",
        margin,
        f"{mean(seconds):.1f}" if seconds else "–",
        readings(way.criterion, stages, way.policy),
        "" if few is None else f"{FORMS[few.form]}, {few.stages}: {narrow.at(few, removed)}",
    ]


def _same_draws(narrow: Narrow, way: Way, other: Way, removed: float) -> float:
    """The choice of a way on the draws that another has."""
    draws = narrow.values(other, removed, "choose")
    return mean(v for draw, v in narrow.values(way, removed, "choose").items() if draw in draws)


def held_under(policy: str, stages: int) -> str:
    """The policy whose lines a network comes from."""
    return "re-estimate" if policy == "re-estimate" and stages > 1 else "frozen"


def readings(criterion: str, stages: int, policy: str) -> str:
    score = 0 if criterion == "magnitude" else stages
    return f"{score} + { {'frozen': 0, 're-estimate': stages, 'late': 1}[policy] }"


def _cost(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield "## Cost"
    yield ""
    yield (
        "Seconds of `sparsify` for one network, several processes on one device, mean ± s.d. over networks (n). The "
        "scores of the dense network are shared by networks of one process, so that most lines hold one score less "
        "than stages, and those of one stage hold ranking and masking alone. A score reads the draw once per stage: "
        "forward and backward for Taylor, the same with derivatives along θ for OBA, forward and a backward for every "
        "image for OBD; Weight reads nothing. Measuring norms reads it once more, forward alone."
    )
    yield ""
    columns = [(stages, policy) for stages in STAGES for policy in ("frozen", "re-estimate")]
    columns.remove((1, "re-estimate"))
    yield from head(
        ["criterion", *(f"{counted(stages, 'stage')}, {SHORT[p]}" for stages, p in columns)]
    )
    for name, criterion in COLUMNS.items():
        cells = [narrow.seconds(criterion, stages, policy) for stages, policy in columns]
        yield line([name, *(f"{spread(own)} ({len(own)})" if own else "–" for own in cells)])


def _choice_tables(choices: Choices) -> Iterator[str]:
    yield ""
    yield "## Every form"
    yield ""
    shares = " / ".join(f"{share:g}" for share in choices.SHARES)
    yield (
        f"Accuracy (%) on images 0–4,999 at {shares}, draw 0 (n = 1). Forms: the normaliser of each tensor's scores, "
        "*+w* with |θ| added. In bold: the best mean of the three shares. Criteria by their names in the library; "
        "`random` has one seed. Rows that nobody measured are left out."
    )
    for stages, policy in itertools.product((1, 5), POLICIES):
        rows = list(_choice_rows(choices, stages, policy))
        if not rows or (stages == 1 and policy == "re-estimate"):
            continue
        yield ""
        yield f"### {counted(stages, 'stage').capitalize()}, {POLICIES[policy]}"
        yield ""
        yield from head(["criterion", *choices.FORMS])
        yield from rows


def _choice_rows(choices: Choices, stages: int, policy: str) -> Iterator[str]:
    for criterion in choices.criteria:
        own = [choices.values(criterion, form, stages, policy) for form in choices.FORMS]
        means = [-1.0 if None in v else mean(x for x in v if x is not None) for v in own]
        if max(means) < 0 and not any(x is not None for v in own for x in v):
            continue
        best = max(means)
        yield line(
            [
                criterion,
                *(
                    bold(
                        _three(v),
                        means[n] == best >= 0,
                    )
                    for n, v in enumerate(own)
                ),
            ]
        )


def _sparsity(narrow: Narrow, choices: Choices) -> Iterator[str]:
    yield ""
    yield "## Nominal and true sparsity"
    yield ""
    yield (
        "True: zeros counted in the weights of the network. Lines keep four digits. Networks of the report and of the "
        "grid, each once."
    )
    yield ""
    yield from head(
        ["removed", "networks", "largest |true − nominal|", "with emptied layers", "of which"]
    )
    names = ("criterion", "normalise", "magnitude", "stages", "policy", "draw", "removed")
    every_row = {tuple(row[n] for n in names): row for row in [*choices.rows, *narrow.rows]}
    for removed in REMOVED:
        own = [row for row in every_row.values() if row["removed"] == removed]
        if not own:
            continue
        emptied = [row for row in own if row["emptied"]]
        told_of = "; ".join(
            f"{row['criterion']}, {form_of(row)}, {counted(int(row['stages']), 'stage')}, draw {row['draw']:g}: "
            f"{row['emptied']:g} layers"
            for row in emptied
        )
        largest = max(abs(row["true"] - removed) for row in own)
        yield line(
            [f"{removed:g}", str(len(own)), f"{largest:.4f}", str(len(emptied)), told_of or "–"]
        )


def _reading(narrow: Narrow, choices: Choices) -> Iterator[str]:
    for removed in JUDGED:
        found = [_won(narrow, removed, policy) for policy in POLICIES]
        yield f"**{removed:g} removed.** " + " ".join(found)
    yield from _alone(narrow)
    yield from _chance(choices)
    yield from _policy_reading(narrow)
    yield (
        "Both halves judge the same networks: the split guards against luck with test images, not against luck with "
        "draws. One network, no training; after training the order may be another."
    )


def _won(narrow: Narrow, removed: float, policy: str) -> str:
    order = ranked(narrow, removed, policy)
    if not order:
        return f"With {POLICIES[policy]} nothing has three draws yet."
    first, weight = order[0], Way("magnitude", "none", 1, policy)
    chance = " (chance has 10 %)" if mean(narrow.values(first, removed).values()) < 20 else ""
    found = (
        f"With {POLICIES[policy]}, *{first.name}* is first on the choice half and keeps "
        f"{narrow.at(first, removed)} %{chance}"
    )
    others = [way for way in order if way.criterion != "magnitude"]
    if first != weight and narrow.gap(first, weight, removed):
        found += (
            f", {margin_told(narrow.gap(first, weight, removed), ' points')} against {narrow.at(weight, removed)} % of "
            f"Weight, plain, for {_price(narrow, first)} in place of {_price(narrow, weight)}"
        )
    if first.criterion == "magnitude" and others:
        margin = margin_told(narrow.gap(others[0], first, removed), " points")
        found += f"; the best that is not Weight, *{others[0].name}*, differs from it by {margin}"
    return f"{found}."


def _price(narrow: Narrow, way: Way) -> str:
    stages = 1 if way.ranks_stay else way.stages
    found = narrow.seconds(way.criterion, stages, held_under(way.policy, stages))
    seconds = f"{mean(found):.1f} s" if found else "unknown seconds"
    return f"{seconds} and {readings(way.criterion, stages, way.policy)} readings"


def _paper_margins(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield "### The paper's form against Weight, plain"
    yield ""
    yield "Points on images 5,000–9,999, paired over draws; stages as in the tables of the paper's form."
    yield ""
    columns = list(itertools.product(JUDGED, POLICIES))
    yield from head(["criterion", *(f"{r:g}, {SHORT[policy]}" for r, policy in columns)])
    for name, criterion in COLUMNS.items():
        cells: list[str] = []
        for removed, policy in columns:
            best = narrow.best(staged(criterion, PAPER, policy), removed)
            weight = Way("magnitude", "none", 1, policy)
            cells.append(margin_told(narrow.gap(best, weight, removed)) if best else "–")
        yield line([name, *cells])


def _alone(narrow: Narrow) -> Iterator[str]:
    """Scores without the magnitude term, against Weight; then with it."""
    for policy, removed in (("frozen", 0.5), ("late", 0.8)):
        weight = Way("magnitude", "none", 1, policy)
        parts: list[str] = []
        for criterion in COLUMNS.values():
            if criterion == "magnitude":
                continue
            shown = [
                f"{narrow.at(way, removed)} ({FORMS[form]})"
                for form in ("none", "max", PAPER)
                if narrow.values(way := Way(criterion, form, 1, policy), removed)
            ]
            if shown:
                parts.append(f"{NAMES[criterion]} {', '.join(shown)}")
        also = Way("magnitude", PAPER, 1, policy)
        yield (
            f"The magnitude term, one stage, {removed:g} removed, {POLICIES[policy]}: {'; '.join(parts)}. Weight has "
            f"{narrow.at(weight, removed)}, and {narrow.at(also, removed)} in the paper's form."
        )
    alone, with_term = list[bool](), list[bool]()
    high = [removed for removed in REMOVED if removed >= 0.5]
    for policy, removed, criterion, stages in itertools.product(POLICIES, high, NAMES, STAGES):
        weight = Way("magnitude", "none", 1, policy)
        if criterion == "magnitude" or (stages == 1 and policy == "re-estimate"):
            continue
        for form in ("none", "max", PAPER):
            gaps = narrow.gap(Way(criterion, form, stages, policy), weight, removed)
            if gaps:
                (with_term if form == PAPER else alone).append(mean(gaps) > 0)
    yield (
        f"From 0.5 on, over policies, stages and criteria that were measured: without the term (plain, max) "
        f"{alone.count(False)} of {len(alone)} cells are not above Weight, plain; with it (max + |θ|) "
        f"{with_term.count(True)} of {len(with_term)} are above."
    )


def _chance(choices: Choices) -> Iterator[str]:
    """Chance in place of a score, and the best of the grid."""
    shares = " / ".join(f"{share:g}" for share in choices.SHARES)
    for policy in ("frozen", "late"):
        shown = [
            f"{name} {_three(values)} ({FORMS[form]})"
            for form in (PAPER, "l2+w")
            for name in ("random", "oba", "taylor", "obd-fisher")
            if None not in (values := choices.values(name, form, 1, policy))
        ]
        if shown:
            yield (
                f"Chance in place of a score, one stage, draw 0, images 0–4,999, {POLICIES[policy]}, {shares}: "
                f"{'; '.join(shown)}. Where chance does as well as a score, it is |θ| that ranks."
            )
    for policy in ("frozen", "late"):
        found = {
            (name, form): values
            for name in choices.criteria
            for form in choices.FORMS
            if None not in (values := choices.values(name, form, 1, policy))
        }
        for place in (1, 2):
            order = sorted(found, key=lambda key: -found[key][place])[:3]
            named = ", ".join(
                f"{name} {form} {found[name, form][place]:.1f}" for name, form in order
            )
            if order:
                yield (
                    f"First of the grid at {choices.SHARES[place]:g}, one stage, {POLICIES[policy]} (n = 1, with "
                    f"hindsight): {named}."
                )


def _three(values: list[float | None]) -> str:
    return " / ".join("–" if x is None else f"{x:.1f}" for x in values)


def _staged_table(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield "## What stages are worth"
    yield ""
    yield "Points against one stage, the paper's form, images 5,000–9,999, paired over the draws that both have."
    yield ""
    columns = list(itertools.product(JUDGED, STAGES[1:]))
    yield from head(["criterion", "norms", *(f"{r:g}: {stages} stages" for r, stages in columns)])
    for criterion, policy in itertools.product((*STAGED, "obd-fisher"), POLICIES):
        one = Way(criterion, PAPER, 1, policy)
        cells = [
            margin_told(narrow.gap(Way(criterion, PAPER, stages, policy), one, removed))
            for removed, stages in columns
        ]
        if set(cells) != {"–"}:
            yield line([NAMES[criterion], SHORT[policy], *cells])


def _policy_reading(narrow: Narrow) -> Iterator[str]:
    again = [100 * row["late_report"] - narrow.accuracy for row in narrow.dense.values()]
    yield (
        f"Norms measured on 2,000 images change the dense network by {signed(mean(again))} points, so at small shares "
        f"frozen norms are better; for Weight they are up to {_crossing(narrow)}."
    )
    for removed in JUDGED:
        frozen, late = (
            {
                criterion: mean(values.values())
                for criterion in COLUMNS.values()
                if (
                    values := narrow.values(
                        Way(criterion, paper_form(criterion), 1, policy), removed
                    )
                )
            }
            for policy in ("frozen", "late")
        )
        both = [late[criterion] - frozen[criterion] for criterion in frozen if criterion in late]
        if len(both) > 1:
            yield (
                f"At {removed:g}, in one stage, measuring the norms at the end is worth {signed(min(both))} to "
                f"{signed(max(both))} points; from the worst to the best criterion of the paper's table it is "
                f"{max(frozen.values()) - min(frozen.values()):.1f} points with norms frozen and "
                f"{max(late.values()) - min(late.values()):.1f} with norms measured."
            )


def _crossing(narrow: Narrow) -> str:
    better = [
        removed
        for removed in REMOVED
        if (
            gaps := narrow.gap(
                *(Way("magnitude", "none", 1, p) for p in ("frozen", "late")), removed
            )
        )
        and mean(gaps) > 0
    ]
    return f"{max(better):g}" if better else "none"


def _missing(narrow: Narrow) -> Iterator[str]:
    yield ""
    yield "## Not measured yet"
    yield ""
    yield (
        "Networks of the paper's form and of max, under both policies, three draws; ten shares (OBD in stages: 0.8 and "
        "0.9)."
    )
    yield ""
    yield from head(["criterion", *(f"{counted(stages, 'stage')}" for stages in STAGES)])
    for criterion in (*STAGED, "obd-fisher"):
        cells: list[str] = []
        for stages in STAGES:
            few = criterion == "obd-fisher" and stages > 1
            policies = ("frozen",) if stages == 1 else ("frozen", "re-estimate")
            asked = list(
                itertools.product(
                    (PAPER, "max"), (stages,), policies, JUDGED if few else REMOVED, DRAWS
                )
            )
            got = sum(draw in narrow.held.get((criterion, *key), {}) for *key, draw in asked)
            cells.append("all" if got == len(asked) else f"{got} of {len(asked)}")
        yield line([NAMES[criterion], *cells])
