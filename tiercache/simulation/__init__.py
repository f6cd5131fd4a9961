"""The production core in virtual time: simulated tiers, scripted faults, and a model that knows.

Tree, catalog, planner, policies, carrier and the transfer protocol are the ones that serve; only
the clock, the media and the requests are simulated. One seed decides everything, so any failure can
be replayed exactly.

    scenario    what a seed chooses: sizes, speeds, limits, operations and faults
    medium      pools and the store that stand for memories and a disk
    transfers   lanes of workers in virtual time; where faults strike
    oracle      a plain model of what is stored where, told what happened, asked what must be
    requests    a request's life, stage by stage
    world       all of it together, one operation at a time
    journal     what happened how often, and the last of it in words
    run         many steps, many seeds
"""
