"""Host bookkeeping of the KV cache: slots, pages, prefix tree. Imports no jax."""
