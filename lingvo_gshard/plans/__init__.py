"""Plans of registered experiments: an experiment is a program whose letters and roles are known."""
