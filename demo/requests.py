"""What the demo asks: four questions of different kinds, and requests of one narrow kind, the facts of a short passage
as JSON. The places are invented."""

PROMPTS: dict[str, str] = {
    "translation": (
        "Translate into French, then repeat the English sentence: 'The boat leaves the harbour when the tide turns, "
        "and the boat comes back when the tide turns again.'"
    ),
    "summary": (
        "Summarise in two sentences: Neap tides happen twice a month, when the sun and the moon pull at right angles. "
        "The sun then cancels part of the moon's pull, so high water is lower and low water is higher than on other "
        "days. Sailors plan around neap tides because the currents are weaker, and harbours with a shallow entrance "
        "may be closed to large ships until the tides grow again."
    ),
    "question": "Why does the sea taste of salt while most rivers do not?",
    "maths": (
        "A ferry carries 48 cars on each trip and makes 6 trips a day. How many cars does it carry in 5 days? Work it "
        "out step by step."
    ),
}

TASK = (
    'Write the facts of this passage as JSON with the keys "name", "kind", "country", "year", "size" and "keeper".'
    "\n\nPassage: "
)
PASSAGES = (
    "Oystergate is a lighthouse in Norland. It was built in 1871 and is 38 metres high. Ada Merrow keeps it.",
    "In 1904 the Saltmarsh Mill began to grind corn in Westerholm. The windmill is 21 metres high, and Tom Barley runs "
    "it.",
    "The ferry Grey Heron sails in Ostervik. She was launched in 1968, is 54 metres long, and Captain Ruth Lund "
    "commands her.",
    "Norland's museum of knots, the Bowline House, opened in 1992. It has 14 rooms. Its keeper is Peter Quill.",
    "Harrow Bridge crosses the strait of Westerholm. The bridge is 310 metres long. It dates from 1933. Ines Vold "
    "looks after it.",
    "Jonas Reed keeps the observatory of Cold Hill in Sunmark, a dome 12 metres wide that was finished in 1957.",
    "Tidewell is a harbour in Ostervik, dug in 1845 for 60 boats. The harbour master is Clara Nett.",
    "The lighthouse Black Tooth stands on a reef off Sunmark. Since 1889 its lamp has burned 27 metres above the sea. "
    "Olaf Stern keeps it.",
    "Westerholm built the library of Elm Court in 1926. It holds 42000 books. Mira Falk is the librarian.",
    "The canal Long Ditch in Norland was opened in 1798. It is 19 kilometres long, and Henry Lock minds its gates.",
    "Fernside is a botanical garden in Sunmark. It covers 8 hectares and was planted in 1911. The head gardener is "
    "Lily Moss.",
    "A windmill called Old Wren turns in Ostervik. It was raised in 1762, is 17 metres high, and belongs to Karl "
    "Thatcher.",
    "The weather station of Gull Point in Norland has measured rain since 1938. Its mast is 30 metres high. Eva Storm "
    "reads it.",
    "Sunmark's theatre, the Lantern, has 640 seats. It was opened in 1899. Hugo Stage directs it.",
    "The tower Three Bells in Westerholm was finished in 1654. It is 47 metres high. Greta Toll rings its bells.",
    "Rope Walk is a market hall in Ostervik, 85 metres long, from 1873. Sam Fisher runs the market.",
    "In Norland the ice house of Deep Lane was built in 1820. The cellar is 9 metres deep. Nora Frost has its key.",
    "The ship Morning Tern was built in Sunmark in 1931. She is 41 metres long and serves as a school. Captain Erik "
    "Sand leads it.",
    "Westerholm has a tunnel, the Mole, that was dug in 1978. It is 1400 metres long. The engineer in charge is Paula "
    "Stone.",
    "The brewery Copper Crane in Ostervik has made beer since 1867. It has 22 kettles. Max Hopper is the brewer.",
    "Norland's railway station Fen Junction was opened in 1882. It has 7 platforms, and Alice Rail is the station "
    "master.",
    "The lighthouse White Finger in Westerholm is 33 metres high. It was lit in 1906. Ben Harbour keeps it.",
    "Seven Oaks is a park in Sunmark. It covers 26 hectares and dates from 1841. The warden is Rosa Field.",
    "The dam of Quiet Water in Ostervik was closed in 1959. It is 220 metres long. Leo Brook watches over it.",
)
NUM_LEARNED = 20
LEARNED = tuple(TASK + passage for passage in PASSAGES[:NUM_LEARNED])
MEASURED = tuple(TASK + passage for passage in PASSAGES[NUM_LEARNED:])
