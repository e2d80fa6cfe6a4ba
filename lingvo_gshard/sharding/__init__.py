"""The annotation API, the mesh, and the table from dims to mesh axes."""
