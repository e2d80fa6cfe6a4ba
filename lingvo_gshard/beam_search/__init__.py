"""The flat beam search of appendix A.1, which knows no task."""
