"""The plan that the app opens with: Llama-3-8B, all layers, on 8 x 8 H100. `python -m app.demo` makes the files again."""
