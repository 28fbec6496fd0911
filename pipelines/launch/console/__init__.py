"""Terminal output of a job: screen, progress line, Ray job status, errors and exit codes."""
