"""The processes of a run, and how they end. Importing this package imports none of it.

Parent and launcher: `agent` is torch's elastic launcher, `watchdog` names the rank that stands still. A worker: `frame`
goes around its work, `signals` asks it to stop at a safe point, `ranks` is what it exchanges with the others (the only
module here that imports torch). `rankfile` is how workers tell the parent that they live and how they ended.
"""
