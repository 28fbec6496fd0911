"""One thin script a job: parse the settings, call one function, print where to look."""
