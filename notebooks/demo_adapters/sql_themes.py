"""The vocabulary of `sql`: tables, their columns and the values in them.

A column is `name` (text, values from VALUES or its own `a|b|c`), or `name:low-high` (a number).
"""

from __future__ import annotations

# plural (the table's name), singular, columns. Every fifth is held out.
THEMES: tuple[tuple[str, str, str], ...] = (
    (
        "employees",
        "employee",
        "name, department, city, salary:28000-120000, age:20-65, hire_year:2001-2024",
    ),
    ("products", "product", "title, category, brand, price:3-900, stock:0-500, weight:1-60"),
    ("students", "student", "name, major, city, grade:1-6, age:17-30, credits:0-180"),
    (
        "movies",
        "movie",
        "title, genre, director, release_year:1960-2024, rating:1-10, budget:1-250",
    ),
    ("books", "book", "title, author, genre, pages:80-900, price:5-60, publish_year:1900-2024"),
    (
        "customers",
        "customer",
        "name, country, city, age:18-90, points:0-5000, signup_year:2010-2024",
    ),
    (
        "orders",
        "order",
        "product, status, country, quantity:1-40, total:10-3000, order_year:2015-2024",
    ),
    (
        "flights",
        "flight",
        "airline, origin, destination, distance:120-9000, price:40-1500, seats:40-400",
    ),
    ("patients", "patient", "name, diagnosis, doctor, age:1-99, weight:3-140, visits:1-30"),
    ("cars", "car", "model, maker, color, mileage:0-250000, price:900-90000, build_year:1995-2024"),
    (
        "songs",
        "song",
        "title, artist, genre, duration:90-600, plays:0-90000, release_year:1960-2024",
    ),
    ("hotels", "hotel", "name, city, country, rooms:8-700, stars:1-5, price:30-800"),
    ("players", "player", "name, team, position, goals:0-60, age:16-40, salary:20000-900000"),
    ("countries", "country", "name, continent, language, population:10000-900000, area:300-900000"),
    ("recipes", "recipe", "title, cuisine, author, minutes:5-240, calories:90-1800, servings:1-12"),
    (
        "houses",
        "house",
        "street, city, owner, price:60000-900000, rooms:1-12, build_year:1890-2024",
    ),
    ("courses", "course", "title, department, teacher, credits:1-12, seats:10-300, fee:0-900"),
    ("events", "event", "title, city, organizer, visitors:10-9000, fee:0-300, duration:1-72"),
    ("animals", "animal", "name, species, habitat, weight:1-900, age:1-60, speed:1-110"),
    ("restaurants", "restaurant", "name, cuisine, city, rating:1-10, tables:4-80, price:8-150"),
    (
        "projects",
        "project",
        "title, status, manager, budget:1000-900000, hours:10-4000, start_year:2005-2024",
    ),
    ("games", "game", "title, studio, platform, price:0-80, rating:1-10, release_year:1985-2024"),
    (
        "invoices",
        "invoice",
        "client, status, currency, amount:20-9000, tax:1-900, invoice_year:2012-2024",
    ),
    (
        "buildings",
        "building",
        "name, city, architect, floors:1-120, height:5-600, build_year:1850-2024",
    ),
    ("ships", "ship", "name, owner, harbor, length:8-400, crew:2-900, build_year:1950-2024"),
    ("machines", "machine", "model, maker, location, power:1-900, price:200-90000, hours:0-30000"),
    ("teams", "team", "name, city, coach, wins:0-60, points:0-120, founded_year:1880-2020"),
    (
        "tickets",
        "ticket",
        "subject, status, priority, hours:1-300, replies:0-40, open_year:2016-2024",
    ),
    ("plants", "plant", "name, family, color, height:1-900, price:2-300, age:1-80"),
    (
        "museums",
        "museum",
        "name, city, topic, visitors:100-900000, fee:0-40, founded_year:1750-2020",
    ),
    ("drivers", "driver", "name, city, company, trips:0-9000, rating:1-10, age:19-70"),
    ("phones", "phone", "model, brand, color, price:80-1800, storage:16-1024, battery:1500-6000"),
    (
        "articles",
        "article",
        "title, author, topic, views:0-90000, length:100-9000, publish_year:1998-2024",
    ),
    ("farms", "farm", "name, region, crop, area:1-900, workers:1-90, revenue:1000-900000"),
    ("lakes", "lake", "name, country, region, depth:2-900, area:1-9000, length:1-300"),
)

PEOPLE = (
    "Anna Keller|Omar Haddad|Maria Silva|John Baker|Wei Chen|Elena Popova|David Cohen|Aisha Khan|"
    "Lucas Martin|Nina Berg|Pedro Alves|Sara Lindt|Tom Fisher|Yuki Tanaka|Ivan Novak|Clara Jones"
)
CITIES = (
    "Berlin|Paris|London|Madrid|Rome|Oslo|Vienna|Tokyo|Boston|Chicago|Lisbon|Prague|Dublin|Cairo"
)
COUNTRIES = "Germany|France|Spain|Italy|Norway|Japan|Brazil|Canada|India|Mexico|Egypt|Kenya|Poland"
TITLES = (
    "Silver River|The Long Road|Blue Garden|Night Train|Golden Hour|First Light|Red Stone|"
    "The Quiet Sea|Winter Sun|Broken Glass|Paper Moon|Iron Gate|Green Valley|"
    "Last Summer|Hidden Door|White Noise"
)
MODELS = "Falcon|Comet|Atlas|Nova|Pioneer|Zephyr|Orion|Tiger|Spark|Delta|Vega|Titan|Lynx|Mira|Echo"
COMPANIES = "Acme|Globex|Norda|Vertex|Solis|Bluewave|Kestrel|Lumen|Zenit|Orbit|Fabrik|Tarno|Helix"
WORDS = "north|south|east|west|central|coast|valley|upland"

# By column name, values of text columns.
VALUES: dict[str, str] = {
    **dict.fromkeys(
        (
            "name",
            "author",
            "director",
            "doctor",
            "owner",
            "teacher",
            "organizer",
            "manager",
            "architect",
            "coach",
            "client",
            "artist",
        ),
        PEOPLE,
    ),
    **dict.fromkeys(("city", "origin", "destination", "location", "harbor"), CITIES),
    **dict.fromkeys(("title", "subject", "street", "product"), TITLES),
    **dict.fromkeys(("brand", "maker", "studio", "company", "airline"), COMPANIES),
    "country": COUNTRIES,
    "model": MODELS,
    "department": "Sales|Marketing|Engineering|Finance|Support|Legal|Research|Biology|History",
    "category": "Toys|Garden|Electronics|Clothing|Sports|Kitchen|Office|Beauty",
    "major": "Physics|History|Biology|Economics|Law|Chemistry|Art|Computer Science",
    "genre": "Drama|Comedy|Thriller|Romance|Horror|Fantasy|Jazz|Rock",
    "status": "open|closed|pending|cancelled|active|done",
    "diagnosis": "flu|asthma|diabetes|migraine|anemia|allergy",
    "color": "red|blue|green|black|white|silver|yellow",
    "team": "Lions|Eagles|Sharks|Wolves|Bulls|Rovers|Hawks",
    "position": "goalkeeper|defender|midfielder|striker",
    "continent": "Africa|Asia|Europe|Oceania|America",
    "language": "English|French|Spanish|Arabic|Hindi|Portuguese|German",
    "cuisine": "Italian|Mexican|Thai|Indian|French|Greek|Japanese",
    "species": "lion|eagle|turtle|wolf|otter|parrot|zebra",
    "habitat": "forest|desert|ocean|river|savanna|mountain",
    "platform": "PC|console|mobile|arcade|web",
    "currency": "EUR|USD|GBP|JPY|CHF",
    "priority": "low|medium|high|urgent",
    "family": "rose|palm|fern|lily|mint|pine",
    "topic": "art|science|history|sports|politics|travel|music",
    "region": WORDS,
    "crop": "wheat|corn|rice|potatoes|grapes|olives",
}
