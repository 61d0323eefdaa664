"""A federation of real nodes on Flower: the same methods, rounds and records as everywhere.

`wire` is what crosses the network, `client` answers on a node, `nodes` is an engine whose clients
are far away; the rounds themselves are `fedkeel.experiment`'s. Needs the extra ``flower``.
"""
