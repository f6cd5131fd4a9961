"""Why a prompt token had to be computed, and what in the traffic makes it so.

`spans` and `reasons` give every missed token one reason, `ghosts` remembers what has left,
`records` keeps the newest requests, `namespaces` knows which field separates two of them.
`shingles`, `compare`, `classify` and `report` find prompts that differ early and agree later.
"""
