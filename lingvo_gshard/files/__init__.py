"""Files that only this library reads or writes: safetensors, LFS pointers, text."""
