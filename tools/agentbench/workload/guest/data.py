"""Workload data: an agent analyses tables.

The template holds the input files, as files: two years of a shop's orders with
customers and prices, made up, but with the shape of real data: popular and rare
articles, business hours, price points, typed texts. Clones load what they need
into the persistent interpreter, and keep results there and in files.
"""

import os

import numpy as np
import pandas as pd

DIR = "/srv/data"
ORDERS, CUSTOMERS, ARTICLES, DAYS = 450000, 40000, 2000, 730
CITIES = ["Aachen", "Bergen", "Chania", "Dublin", "Espoo", "Faro", "Gent", "Haifa", "Izmir", "Jena", "Krakow",
          "Lyon", "Malaga", "Nantes", "Oulu", "Porto", "Riga", "Split", "Turin", "Utrecht"]
CATEGORIES = ["books", "garden", "kitchen", "lighting", "music", "office", "outdoor", "pets", "sports", "tools", "toys"]
STATES = ["delivered", "returned", "cancelled", "lost", "open"]
WORDS = ("please leave the parcel at door with neighbour ring twice call before gift wrap no plastic second floor "
         "back yard urgent birthday thank you invoice company deliver after six morning only fragile happy").split()
NAMES = ("anna bruno carla dario elena felix greta henri ida jonas katja luca mara nils olga pavel quentin rosa "
         "stefan tilda ugo vera wanda xenia yann zoe").split()


def build(server):
    n = np.random.default_rng(server.seed)
    os.makedirs(DIR + "/out")
    popularity = 1 / np.arange(1, ARTICLES + 1) ** 0.9
    base = np.round(np.exp(n.normal(3.0, 0.9, ARTICLES))) - 0.01
    base = np.maximum(base, 0.99)
    article_category = n.integers(0, len(CATEGORIES), ARTICLES)

    day = n.choice(DAYS, ORDERS, p=season(n))
    minute = np.clip(n.normal(14.5 * 60, 3.2 * 60, ORDERS), 0, 1439).astype(int)
    seconds = np.sort(day * 86400 + minute * 60 + n.integers(0, 60, ORDERS))
    article = n.choice(ARTICLES, ORDERS, p=popularity / popularity.sum())
    discount = n.choice([0, 0.05, 0.1, 0.2], ORDERS, p=[0.7, 0.12, 0.12, 0.06])
    customer = (CUSTOMERS * n.random(ORDERS) ** 2.2).astype(int)
    orders = pd.DataFrame({
        "order": 4000000 + np.cumsum(n.integers(1, 6, ORDERS)),
        "time": pd.Timestamp("2022-01-01") + pd.to_timedelta(seconds, unit="s"),
        "customer": customer,
        "article": ["A-%06d" % (137 * a % 999983) for a in article],
        "category": np.array(CATEGORIES)[article_category[article]],
        "quantity": n.geometric(0.62, ORDERS),
        "price": np.round(base[article] * (1 - discount), 2),
        "state": n.choice(STATES, ORDERS, p=[0.86, 0.07, 0.04, 0.005, 0.025]),
        "note": notes(n),
    })
    orders.to_csv(DIR + "/orders.csv", index=False)

    first = n.integers(0, len(NAMES), CUSTOMERS)
    customers = pd.DataFrame({
        "customer": np.arange(CUSTOMERS),
        "name": [NAMES[i] for i in first],
        "mail": ["%s.%d@example.com" % (NAMES[i], k) for i, k in zip(first, n.permutation(CUSTOMERS))],
        "city": np.array(CITIES)[(len(CITIES) * n.random(CUSTOMERS) ** 1.7).astype(int)],
        "since": pd.Timestamp("2015-01-01") + pd.to_timedelta(n.integers(0, 2900, CUSTOMERS), unit="D"),
        "class": n.choice(["a", "b", "c"], CUSTOMERS, p=[0.1, 0.3, 0.6]),
    })
    customers.to_csv(DIR + "/customers.csv", index=False)

    # Prices of competitors, day by day: cents that walk and rarely jump.
    moves = np.where(n.random((DAYS, ARTICLES)) < 0.08, n.normal(0, 0.03, (DAYS, ARTICLES)), 0)
    np.savez(DIR + "/prices.npz", article=np.arange(ARTICLES), price=np.round(base * np.exp(moves.cumsum(axis=0)), 2))

    server.namespace.update(np=np, pd=pd, DIR=DIR)
    for kind in SNIPPETS:
        server.steps[kind] = snippet(server, kind)
    return {"bytes": sum(os.path.getsize(os.path.join(DIR, f)) for f in ("orders.csv", "customers.csv", "prices.npz"))}


def season(n):
    days = np.arange(DAYS)
    weight = 1 + 0.3 * np.sin(days / 365 * 2 * np.pi) + 0.8 * (days % 365 > 325) - 0.4 * (days % 7 == 0)
    weight *= n.normal(1, 0.05, DAYS)
    return weight / weight.sum()


def notes(n):
    """A third of the orders have a note of a few words."""
    words = n.integers(0, len(WORDS), ORDERS * 7)
    length = np.where(n.random(ORDERS) < 0.33, n.integers(2, 8, ORDERS), 0)
    return [" ".join(WORDS[w] for w in words[7 * i:7 * i + k]) for i, k in enumerate(length)]


# What the agent's interpreter runs. Frames stay in the namespace by name.
SNIPPETS = {
    "load": '''
orders = pd.read_csv(DIR + "/orders.csv", parse_dates=["time"], dtype={{"category": "category", "state": "category"}}, keep_default_na=False)
customers = pd.read_csv(DIR + "/customers.csv", parse_dates=["since"])
print(orders.shape, customers.shape, orders["price"].describe().round(3).to_dict())
''',
    "filter": '''
f_{name} = orders[(orders["category"].isin({categories})) & (orders["time"].dt.month >= {month}) & (orders["price"] * orders["quantity"] > {floor})].copy()
f_{name}["value"] = (f_{name}["price"] * f_{name}["quantity"]).round(2)
f_{name} = f_{name}.sort_values(["customer", "time", "order"])
f_{name}["so_far"] = f_{name}.groupby("customer")["value"].cumsum()
f_{name}["pause"] = f_{name}.groupby("customer")["time"].diff().dt.total_seconds()
print(len(f_{name}), f_{name}[["value", "so_far", "pause"]].median().round(2).to_dict(), f_{name}["state"].value_counts().sort_index().to_dict())
''',
    "group": '''
t = orders.assign(value=orders["price"] * orders["quantity"], period=orders["time"].dt.{period})
g_{name} = t.groupby([{by!r}, "period"], observed=True).agg(n=("order", "size"), value=("value", "sum"), mean=("price", "mean"), buyers=("customer", "nunique")).reset_index()
del t
print(len(g_{name}), g_{name}.sort_values(["value", "period"], ascending=False).head(5).round(2).to_string())
''',
    "join": '''
j_{name} = orders.loc[(orders["state"] != {state!r}) & (orders["time"].dt.month >= {month}), ["order", "time", "customer", "category", "price"]].merge(
    customers[customers["class"].isin({classes})], on="customer", how="inner")
j_{name}["age"] = (j_{name}["time"] - j_{name}["since"]).dt.days
j_{name}["user"] = j_{name}["mail"].str.split(".").str[0]
p_{name} = j_{name}.pivot_table(index="city", columns="category", values="age", aggfunc={agg!r}, observed=True).fillna(0)
print(j_{name}.shape, p_{name}.shape, p_{name}.sum().round(2).to_dict(), j_{name}["user"].nunique())
''',
    "text": '''
w_{name} = orders.loc[orders["note"].str.contains({word!r}), ["order", "customer", "note"]].copy()
w_{name}["words"] = w_{name}["note"].str.split()
c_{name} = w_{name}.explode("words").groupby("words").size().sort_index().sort_values(ascending=False, kind="stable")
print(len(w_{name}), c_{name}.head(8).to_dict())
''',
    "series": '''
with np.load(DIR + "/prices.npz") as z:
    s_{name} = pd.DataFrame(z["price"], index=pd.date_range("2022-01-01", periods=len(z["price"])), columns=z["article"])
s_{name} = s_{name}.iloc[:, {first}::{stride}]
r_{name} = s_{name}.pct_change().rolling({window}).std()
print(s_{name}.shape, r_{name}.iloc[-1].nlargest(5).round(6).to_dict(), np.round(np.linalg.svd(s_{name}.values, compute_uv=False)[:3], 4).tolist())
''',
    "save": '''
frame = orders.sample({rows}, random_state={seed}).sort_values("order")
frame.to_csv(DIR + "/out/sample_{name}.csv", index=False)
frame.to_pickle(DIR + "/out/sample_{name}.pkl")
np.savez_compressed(DIR + "/out/sample_{name}.npz", order=frame["order"].values, price=frame["price"].values)
back = pd.read_csv(DIR + "/out/sample_{name}.csv", parse_dates=["time"], keep_default_na=False)
print(len(back), (back["price"].values == frame["price"].values).all(), round(float(back["price"].sum()), 2))
del frame, back
''',
}


def snippet(server, kind):
    def step(**args):
        return server.repl(SNIPPETS[kind].format(**args))
    return step
