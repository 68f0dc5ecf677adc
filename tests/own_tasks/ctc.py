"""Speech recognition: wav2vec2 with CTC on tones."""

import numpy as np
import torch
import torch.nn.functional as F
from predicting import Predicting
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from tpukit.train.task import Datasets, TrainingDefaults


def tones(index):
    rng = np.random.default_rng(index)
    letters = rng.integers(1, 6, 3)
    time = np.arange(400)
    wave = np.concatenate([np.sin(time * (0.1 + 0.2 * letter)) for letter in letters])
    return {"wave": wave.astype(np.float32), "letters": letters}


class Speech(Predicting):
    defaults = TrainingDefaults(global_batch_size=8, epochs=2, lr=1e-3)

    def build_model(self, ops):
        return Wav2Vec2ForCTC(
            Wav2Vec2Config(
                vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=24, conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(10, 8),
                num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
                hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
                final_dropout=0.0, activation_dropout=0.0,
            )
        )  # fmt: skip

    def datasets(self):
        return Datasets([*map(tones, range(32))], [*map(tones, range(13))])

    def loss(self, model, batch):
        scores = model(batch["wave"]).logits.float().log_softmax(2).transpose(0, 1)
        frames = torch.full_like(batch["letters"][:, 0], scores.shape[0])
        lengths = torch.full_like(frames, 3)
        losses = F.ctc_loss(scores, batch["letters"], frames, lengths, reduction="none")
        return {"loss": losses / 3}

    def outputs(self, model, batch):
        return model(batch["wave"]).logits.argmax(2)
