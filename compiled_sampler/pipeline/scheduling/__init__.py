"""How a step is computed, decided once on the host: its schedule, its scratch, its chunks of rows."""
