"""What a run writes down and reads back. Importing this package imports none of it, and none of it imports torch.

`rundir` is the run directory: one owner, whole files. `jsonio` writes and reads them, `groupjson` is how groups look in
them, `ledger` is what became of every prompt, and `redact` keeps secrets out.
"""
