"""Writes the corpus and the database of this folder again."""

from baton.examples.data import CORPUS, DATABASE, write_corpus, write_database

write_corpus(CORPUS)
write_database(DATABASE)
print(f"wrote {CORPUS.name} and {DATABASE.name}")
