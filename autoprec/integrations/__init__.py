"""Policies inside training frameworks: Hugging Face Trainer (:mod:`.transformers`) and Lightning (:mod:`.lightning`).

Plain loops, accelerate, DDP and FSDP2 need nothing but ``policy.apply(model)`` and ``policy.wrap_optimizer(optimizer)``
(``examples/integrations``).
"""
