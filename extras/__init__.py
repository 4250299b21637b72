"""What align, finetune and evaluate do without; only `cli` imports from here."""
