"""The networks of the second zoo, none of which the first has: by family, in small configurations, random weights.

`zoo_second_pictures` lists those of pictures, films and graphs, `zoo_second_sequences` those of text, sound and series.
`zoo_second.txt` has the packages; a network whose package is missing is reported as skipped, never as passed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs as a script, not installed

from zoo_second_networks import Network
from zoo_second_pictures import PICTURES
from zoo_second_sequences import SEQUENCES

__all__ = ["ENTRIES"]

ENTRIES: tuple[Network, ...] = (*SEQUENCES, *PICTURES)
