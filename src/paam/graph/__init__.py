"""How channels flow through a network: trace it, find which filters share a gate, shrink it exactly.

trace.py        model and example -> graph with shapes
flows.py        how channels propagate through an operation; joins.py: operations with several inputs
rules.py        one table: operation -> its flow, by the rules of layers.py, elementwise.py and movement.py
site.py         the inputs and the result of a rule
solve.py        kept filters -> which channels remain where, and what that costs
path.py         the filters that must be kept so that the output depends on the input
attach.py       where gates go; the gated network
compact.py      kept filters -> the smaller network; channel_map.py: the extra layers it may contain
"""
