"""The programs as functions, for scripts and notebooks: `import lingvo_gshard as gshard`."""
