"""AnnotatedFn -> Program -> Executable."""
