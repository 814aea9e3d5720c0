"""The `lowpeak` command. Nothing here loads torch before a command needs it."""
