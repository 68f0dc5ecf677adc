"""A directory as of Qwen, its tokenizer with other rules than GPT-2's, and a tiny model."""

import json

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder, chat=CHAT, spaces=False):
    """spaces: blanks are written as SentencePiece does, one before every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]+\n*|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    if spaces:
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    made.train_from_iterator(
        ["Ann and Bob came alone. Be brief, who?", "[INST] x[/INST] \n:\n\nAnn"] * 9,
        trainers.BpeTrainer(
            vocab_size=300, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    made.add_special_tokens(["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": chat,
                "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made.get_vocab_size()


def write_qwen(folder, spaces=False):
    """Tokenizer, configuration and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=write_tokenizer(folder, spaces=spaces), hidden_size=32,
        intermediate_size=48, head_dim=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
