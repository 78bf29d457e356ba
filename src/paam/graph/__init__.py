"""How channels flow through a network: trace it, say which filters share a gate, shrink it exactly.

trace.py        model and example -> graph with shapes
flows.py        the few ways in which channels travel through an operation; joins.py those with several inputs
rules.py        one table: operation -> its flow, by the rules of layers.py, elementwise.py and movement.py
site.py         what a rule sees and returns
solve.py        kept filters -> which channels remain where, and what that costs
path.py         the filters that must stay, so that the output depends on the input
attach.py       where gates go; the gated network
compact.py      kept filters -> the smaller network; channel_map.py the extra layers it may hold
"""
