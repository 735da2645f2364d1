"""The process: launcher, cores, files, and the end of a job."""
