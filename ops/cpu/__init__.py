"""The CPU backend: torch arithmetic for select and rescue, POSIX shared memory for the exchange."""
