"""`phalanx demo`: a small GPT trained on text that every Python ships.

`text` and `gpt` are plain torch; `train` is what each worker runs; `show` starts them and is the command.
"""
