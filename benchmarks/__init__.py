"""Measured side by side with other libraries: `python -m benchmarks.NAME [--quick]`.

Each module here is a command; `harness/` is what they share. The last line that a command prints is one JSON object.
The peer has to be installed by hand: it is never a dependency of lowpeak. `--quick` tries a command within a minute, on
small sizes, and with lowpeak alone where the peer is not installed.
"""
