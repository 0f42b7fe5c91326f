"""The page of the sparse ResNet50. Every number in it is computed from the lines."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean
from typing import Any

from narrow_lines import Row
from narrow_tables import signed
from sparse_ways import (
    LARGE_POLICIES,
    NAMES,
    PAPER,
    POLICIES,
    STAGES,
    Large,
    Way,
    bold,
    head,
    large_ways,
    line,
    spread,
    told,
)


def large_page(large: Large, about: dict[str, Any]) -> Iterator[str]:
    runs = about["runs"]
    yield "# Which single weights can the public ResNet50 do without? ImageNet, no training"
    yield ""
    yield "```"
    for run in runs:
        yield run["command"]
    yield "```"
    yield ""
    told_runs = {
        f"{run['device']}, torch {run['torch']}, {'tf32' if run['options']['tf32'] else 'float32'}, commit "
        f"{run['commit']}"
        for run in runs
    }
    draws = sorted({int(row["draw"]) for row in large.rows})
    yield (
        f"{'; '.join(sorted(told_runs))}. {about['note']} {len(large.rows)} networks, draws "
        f"({', '.join(map(str, draws))}) of 500 images that scores and norms see; figures on 2,000 other validation "
        f"images, where the dense network has **{large.dense:.2f} %**. One global threshold. There is no second half "
        "to choose on: the best of several is seen with hindsight. Standard errors are of the 2,000 images (up to "
        f"{100 * math.sqrt(0.25 / 2000):.1f} points for one network); n is 1 draw unless a cell says otherwise; – is "
        "not measured. Weight is |θ|; stages do not change it. The paper's form is max + |θ|."
    )
    yield ""
    yield "![accuracy against the share removed](sparse_resnet50.png)"
    for policy in LARGE_POLICIES:
        ways = large_ways(policy)
        yield ""
        yield f"## {POLICIES[policy][0].upper()}{POLICIES[policy][1:]}"
        yield ""
        yield "Accuracy (%), ratio to the dense network's in brackets. In bold: the best of the row."
        yield ""
        yield from head(["removed", *(way.name for way in ways)])
        for removed in large.removed:
            best = large.best(ways, removed)
            yield line(
                [
                    f"{removed:g}",
                    *(bold(_large_cell(large, way, removed), way == best) for way in ways),
                ]
            )
    yield from _large_rest(large, runs)


def _large_cell(large: Large, way: Way, removed: float) -> str:
    values = large.values(way, removed)
    if not values:
        return "–"
    return f"{told(values, usual=1)} ({mean(values.values()) / large.dense:.2f})"


def _large_rest(large: Large, runs: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## Cost"
    yield ""
    yield (
        "Seconds and memory of `sparsify` for one network, several processes on one device: mean over shares, forms "
        "and draws (n networks). Processes at a time, in the order of the commands above: "
        f"{', '.join(str(run['options']['workers']) for run in runs)}; seconds of different runs do not compare."
    )
    yield ""
    yield from head(["criterion", "stages", "norms", "seconds", "GiB", "n"])
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in large.rows:
        groups[row["criterion"], int(row["stages"]), row["batch_norm"]].append(row)
    for (criterion, stages, policy), own in groups.items():
        yield line(
            [
                NAMES[criterion],
                "any" if criterion == "magnitude" else str(stages),
                policy,
                spread([row["seconds"] for row in own]),
                f"{mean(row['peak_mib'] for row in own) / 1024:.1f}",
                str(len(own)),
            ]
        )
    largest = max(abs(row["sparsity"] - row["removed"]) for row in large.rows)
    emptied = sum(bool(row["num_emptied"]) for row in large.rows)
    yield ""
    yield (
        f"Nominal and true sparsity (zeros counted in the weights) differ by at most {largest:.4f}; {emptied} of "
        f"{len(large.rows)} networks have an emptied layer."
    )
    yield ""
    yield "## What the lines show"
    yield ""
    for sentence in _large_reading(large):
        yield f"- {sentence}"


def _large_reading(large: Large) -> Iterator[str]:
    for policy in LARGE_POLICIES:
        weight = Way("magnitude", "none", 1, policy)
        parts: list[str] = []
        for removed in large.removed:
            others = [way for way in large_ways(policy) if way.criterion == "oba"]
            best = large.best(others, removed)
            if best and large.values(weight, removed):
                parts.append(
                    f"{removed:g}: {best.name} {_points(large, best, removed)} against "
                    f"{_points(large, weight, removed)}, {_large_margin(large, best, weight, removed)}"
                )
        if parts:
            yield (
                f"The best of OBA against Weight, plain, {POLICIES[policy]} (points ± s.e. as if the two had seen "
                f"different images, which is too wide): {'; '.join(parts)}."
            )
    yield _large_count(large)
    for policy, removed in itertools.product(LARGE_POLICIES, (0.5, 0.7)):
        plain, paper = (
            large.best([Way("oba", form, stages, policy) for stages in STAGES], removed)
            for form in ("none", PAPER)
        )
        own = Way("magnitude", PAPER, 1, policy)
        if plain and paper and large.values(own, removed):
            yield (
                f"The magnitude term, {removed:g} removed, {POLICIES[policy]}: the best of OBA without it has "
                f"{_points(large, plain, removed)} % ({plain.name}), with it {_points(large, paper, removed)} % "
                f"({paper.name}); Weight in the same form has {_points(large, own, removed)} %."
            )
    for policy in LARGE_POLICIES:
        shown = [
            f"{removed:g}: "
            + ", ".join(
                f"{stages} {_points(large, way, removed)}"
                for stages in STAGES
                if large.values(way := Way("oba", PAPER, stages, policy), removed)
            )
            for removed in large.removed
            if large.values(Way("oba", PAPER, 1, policy), removed)
        ]
        yield f"Stages of OBA, max + |θ|, {POLICIES[policy]} (%): {'; '.join(shown)}."
    missing = [
        f"{way.name}, {policy}, {removed:g}"
        for policy in LARGE_POLICIES
        for way in large_ways(policy)
        for removed in large.removed
        if not large.values(way, removed)
    ]
    few = sorted(
        {
            len(large.values(way, r))
            for p in LARGE_POLICIES
            for way in large_ways(p)
            for r in large.removed
        }
        - {0}
    )
    yield (
        f"Not measured: {'; '.join(missing) or 'nothing of these tables'}. Draws per cell: "
        f"{' to '.join(str(n) for n in sorted({few[0], few[-1]}))}. Other criteria and max without |θ| were not tried "
        "on this network."
    )


def _large_count(large: Large) -> str:
    margins = [
        _large_margin(large, way, Way("magnitude", "none", 1, policy), removed)
        for policy in LARGE_POLICIES
        for way in large_ways(policy)
        for removed in large.removed
        if way.criterion == "oba"
        and large.values(way, removed)
        and large.values(Way("magnitude", "none", 1, policy), removed)
    ]
    clear = [margin for margin in margins if "within" not in margin]
    above = sum(margin.startswith("+") for margin in clear)
    return (
        f"Of {len(margins)} cells of OBA, {above} are above Weight, plain, by more than two s.e., {len(clear) - above} "
        f"below, {len(margins) - len(clear)} within."
    )


def _points(large: Large, way: Way, removed: float) -> str:
    return f"{mean(large.values(way, removed).values()):.1f}"


def _large_margin(large: Large, way: Way, other: Way, removed: float) -> str:
    one, two = (mean(large.values(w, removed).values()) / 100 for w in (way, other))
    error = math.sqrt((one * (1 - one) + two * (1 - two)) / 2000)
    within = " (within two s.e.)" if abs(one - two) < 2 * error else ""
    return f"{signed(100 * (one - two))} ± {100 * error:.1f}{within}"
