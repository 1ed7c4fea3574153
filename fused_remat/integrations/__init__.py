"""FusedRemat in other libraries' trainers; a module here imports the library of its name."""
