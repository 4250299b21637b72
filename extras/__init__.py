"""What align, finetune and evaluate do without: pretraining, demo, export, data, pictures."""
