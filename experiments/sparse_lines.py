"""Lines of several runs of one sparse experiment, joined: every network once, nothing but what was measured.

    python experiments/sparse_lines.py experiments/results/sparse_resnet20.csv data/sparse_raw/report*.csv

Text stays as it was written. A network that was measured twice must have the same figures both times (its seconds may
differ: the first are kept). `--like FILE` takes only ways (criterion, normaliser, term of |θ|) that FILE has, or that
the target has already.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

__all__ = ["joined"]

Line = dict[str, str]
WAYS = (("criterion", "normalise", "magnitude"), ("criterion", "saliency"))
"""What names a way to rank, on the narrow network and on the large one."""
NETWORKS = (*WAYS[0], "saliency", "stages", "policy", "batch_norm", "draw", "removed")
NOISY = ("seconds", "peak_mib")


def joined(files: Iterable[list[Line]]) -> list[Line]:
    """Each network once, in order."""
    found: dict[tuple[str, ...], Line] = {}
    for lines in files:
        for line in lines:
            first = found.setdefault(_network(line), line)
            changed = {
                name: (first[name], value)
                for name, value in line.items()
                if name not in NOISY and first[name] != value
            }
            assert not changed, f"measured twice with other figures: {_network(line)}, {changed}"
    return [found[key] for key in sorted(found, key=_order)]


def _network(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in NETWORKS if name in line)


def _way(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in WAYS["saliency" in line])


def _order(key: tuple[str, ...]) -> tuple[tuple[float, str], ...]:
    """Numbers by value."""
    return tuple(
        (float(part), "") if part.replace(".", "").isdigit() else (0.0, part) for part in key
    )


def _read(path: Path) -> list[Line]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="written anew; what it has stays")
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--like", type=Path, nargs="*", default=())
    args = parser.parse_args()
    held = [_read(args.target)] if args.target.exists() else []
    files = held + [_read(path) for path in args.sources]
    if args.like:
        wanted = {_way(line) for lines in [*held, *map(_read, args.like)] for line in lines}
        files = [[line for line in lines if _way(line) in wanted] for lines in files]
    lines = joined(files)
    with args.target.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"{len(lines)} networks of {sum(map(len, files))} lines in {args.target}")


if __name__ == "__main__":
    main()
