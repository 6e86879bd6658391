"""Chats: prompts that a model's template makes, and answers that have reasoning, text and calls of tools."""
