"""A run's weights as a Hugging Face directory."""

from pathlib import Path
from typing import Any

from tpukit.io.files import write_file, writing_errors
from tpukit.tasks.hub import adapters
from tpukit.tasks.hub.models import without_output
from tpukit.train.weights import README_FILE

README = """# A text classifier

```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained(".").eval()
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer({texts}, truncation=True, max_length={length}, return_tensors="pt")
scores = model(**inputs).logits
predictions = {formula}
```

`predictions` are of {what}, in the order of target.json.
{further}"""
WINDOWS = """
A longer text is read in windows (`stride={overlap}, return_overflowing_tokens=True`), whose
predictions are averaged.
"""


def export_hugging_face_classifier(
    model: Any, tokenizer: Any, target: bytes, folder: Path, *, overlap: int | None, **shown: object
) -> list[Path]:
    """Writes it, adapters merged; its files. overlap: of a long text's windows; shown: what the
    README says."""
    further = "" if overlap is None else WINDOWS.format(overlap=overlap)
    if getattr(model.base_model, "peft_config", None):
        adapters.merge_adapter(model.base_model)
    with writing_errors(folder), without_output():
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_file(folder / "target.json", target)
        write_file(folder / README_FILE, README.format(**shown, further=further).encode())
    return sorted(path for path in folder.iterdir() if path.is_file())
