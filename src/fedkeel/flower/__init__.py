"""A federation of real nodes on Flower: the same methods, rounds and records as in a simulation.

`wire` and `protocol` define the messages. `server` holds the server's half: an engine whose clients
are on the nodes. `node` holds a node's half. `local` runs both on one machine. Needs the extra
``flower``.
"""
