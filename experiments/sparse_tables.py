"""Pages and plots of the sparse experiments, from their measured lines; nothing is measured here.

    python experiments/sparse_tables.py

Reads results/sparse_{choose,resnet20,resnet50}.csv with the JSON files beside them, writes sparse_resnet20.{md,png} and
sparse_resnet50.{md,png}. Every number in the prose is computed from the lines; lines may be missing, and are told.
"""

import argparse
import json
from pathlib import Path

from narrow_lines import read_lines
from sparse_large_page import large_page
from sparse_narrow_page import narrow_page
from sparse_plots import plot_large, plot_narrow
from sparse_ways import Choices, Large, Narrow

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args().results
    write_pages(folder)


def write_pages(folder: Path) -> None:
    narrow = Narrow(read_lines(folder / "sparse_resnet20.csv"))
    choices = Choices(read_lines(folder / "sparse_choose.csv"))
    about = json.loads((folder / "sparse_resnet20.json").read_text())
    page = "\n".join(narrow_page(narrow, choices, about))
    (folder / "sparse_resnet20.md").write_text(page + "\n")
    plot_narrow(narrow, folder / "sparse_resnet20.png")
    large = Large(read_lines(folder / "sparse_resnet50.csv"))
    about = json.loads((folder / "sparse_resnet50.json").read_text())
    (folder / "sparse_resnet50.md").write_text("\n".join(large_page(large, about)) + "\n")
    plot_large(large, folder / "sparse_resnet50.png")


if __name__ == "__main__":
    main()
