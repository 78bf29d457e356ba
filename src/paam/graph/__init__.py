"""How channels flow through a network: trace it, say which filters share a gate, shrink it exactly.

trace.py    model and example -> graph with shapes
flows.py    the few ways in which channels travel through an operation
rules.py    one table: operation -> its flow, by the rules of layers.py, elementwise.py and movement.py
solve.py    kept filters -> which channels remain where
attach.py   where gates go; the gated network
compact.py  kept filters -> the smaller network
"""
