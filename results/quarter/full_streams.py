"""A plan that leaves ResNet-56's streams whole and keeps a quarter of every inner layer: full_streams.py FILE

Runs take its widths alone (target.widths); which filters stay is for their scorer to say.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from paam.graph.network import prepare
from paam.models import resnet56

network = prepare(resnet56(), torch.zeros(1, 3, 32, 32), streams="tied")
kept = {group.name: group.width if group.stream else group.width // 4 for group in network.groups}
choice = {group.name: np.arange(group.width) < kept[group.name] for group in network.groups}
Path(sys.argv[1]).write_text(network.plan(choice).to_json())
cost = network.cost(choice)
shares = f"{cost.macs / network.dense.macs:.4f} of the MACs, {cost.params / network.dense.params:.4f} of the parameters"
sys.stdout.write(f"keeps {shares}\n")
