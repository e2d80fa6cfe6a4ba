"""The process around JAX: versions, private names, environment variables, log lines."""
