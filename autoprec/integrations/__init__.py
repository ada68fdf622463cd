"""Policies inside training frameworks: Hugging Face Trainer (:mod:`.transformers`) and Lightning (:mod:`.lightning`).

Plain loops, accelerate, DDP and FSDP2 need nothing: ``policy.apply(model)`` is enough (``examples/integrations``).
"""
