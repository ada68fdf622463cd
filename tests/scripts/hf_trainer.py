"""Hugging Face Trainer on a tiny Llama, random tokens, saving checkpoints on the way."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
model = LlamaForCausalLM(config)
rows = [torch.randint(0, 64, (16,)) for _ in range(200)]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(rows)

    def __getitem__(self, i):
        return {"input_ids": rows[i], "labels": rows[i]}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            print(f"step {state.global_step - 1} loss {float(logs['loss']):.6f}", flush=True)


arguments = TrainingArguments(
    output_dir="hf-out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    logging_steps=1,
    save_steps=5,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Print()]).train()
