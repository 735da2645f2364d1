"""This process: what the launcher says, its cores, its files, and how a job ends."""
