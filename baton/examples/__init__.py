"""Demonstrations: example environments, and small synthetic data for them. Nothing else needs them.

gsm8k          word problems with a number as answer, one turn
lookup         the quick start's task: look up facts over several turns, then answer
search_r1      search a corpus over several turns, then answer (Search-R1)
text_to_sql    query a SQLite database over several turns, then give the final query
data           a small corpus and a database, and the code that makes them
"""
