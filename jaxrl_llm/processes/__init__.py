"""Worker processes: starting, limiting and ending them, and messages between processes."""
