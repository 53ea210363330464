"""`megalite data`: from raw text to packed training data, one verb a station."""

from __future__ import annotations

import typer

from megalite.cli.data import documents, recipes, reports, tokens

app = typer.Typer(help="Clean, deduplicate, tokenize, pack, mix and look at training data.", no_args_is_help=True)

app.command("prepare")(recipes.prepare)
app.command("work")(recipes.work)
app.command("clean")(documents.clean)
app.command("url-dedup")(documents.url_dedup)
app.command("dedup")(documents.dedup)
app.command("near-dedup")(documents.near_dedup)
app.command("line-dedup")(documents.line_dedup)
app.command("substring-dedup")(documents.substring_dedup)
app.command("decontaminate")(documents.decontaminate)
app.command("harmful")(documents.harmful)
app.command("perplexity")(documents.perplexity)
app.command("classifier")(documents.classifier)
app.command("semantic-dedup")(documents.semantic_dedup)
app.command("train-tokenizer")(tokens.train_tokenizer)
app.command("compare-tokenizers")(tokens.compare_tokenizers)
app.command("tokenize")(tokens.tokenize)
app.command("pack")(tokens.pack)
app.command("rank")(tokens.rank)
app.command("mix-plan")(recipes.mix_plan)
app.command("effects")(reports.effects)
app.command("inspect")(reports.inspect)
app.command("card")(reports.card)
app.command("show")(reports.show)
app.command("verify")(reports.verify)
