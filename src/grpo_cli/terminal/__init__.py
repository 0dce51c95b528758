"""What a person types and sees. Importing this package imports none of it.

`parser` is what every command shares: arguments, usage errors and findings in one form. `usage` is what `--help` says,
`completion` what a shell offers, and `console` what is shown while a run goes on.
"""
