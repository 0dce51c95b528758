"""Checkpoints: saved and resumed in any layout, without pickle. Importing this package imports none of it.

`store` saves, resumes and reads weights; `zerostate` finds this rank's share of them, `tensorfile` writes them and
`randomstate` does random states. `manifest` (is a directory whole?) and `resume` (what would resuming mean?) know files
alone and import no torch.
"""
