"""TRL's trainer on a converted model."""

from __future__ import annotations

import pytest
import torch

import meshnorm

trl = pytest.importorskip("trl", reason="TRL is not installed")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")


def test_supervised_fine_tuning_has_the_losses_it_had(tmp_path) -> None:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w2"
    )
    tokens = torch.randint(3, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    data = datasets.Dataset.from_dict({"input_ids": tokens.tolist()})
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
    losses = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if converts:
            assert len(meshnorm.convert(model).swapped) == 5
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
