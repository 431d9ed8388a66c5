"""What every peer's program of compare.py does: it prints JSON.

python PEER.py MODEL THREADS '{"1 stream": [1, 512, 64]}'      # speeds: {case: {figure: value}}
python PEER.py MODEL THREADS FOLDER                           # precision against what is kept there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from quality import measure

Speeds = Callable[[str, int, dict[str, list[int]]], dict[str, dict[str, float]]]
# Of a model and threads: what gives the logits of every token of a document.
Load = Callable[[str, int], Callable[[list[int]], np.ndarray]]


def run(speeds: Speeds, load: Load | None = None) -> None:
    model, threads, task = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if task.startswith("{"):
        print(json.dumps(speeds(model, threads, json.loads(task))))
    elif load is None:
        sys.exit("gives no distributions")
    else:
        print(json.dumps(measure(load(model, threads), Path(task))))
