"""What a batch is, decided on the host: its callable and layouts, its bucket, its route."""
