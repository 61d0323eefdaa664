"""Features: what a run may do beside training. Each lies in a folder of its own.

Adding one is a folder here and a line below; an installed package adds its own by an entry point.
"""

FEATURES = (
    "fedkeel.features.own_training.declaration:OwnTrainingDeclaration",
    "fedkeel.features.baselines.declaration:BaselinesDeclaration",
    "fedkeel.features.selection.declaration:SelectionDeclaration",
    "fedkeel.features.time.declaration:SystemDeclaration",
    "fedkeel.features.root.declaration:RootDeclaration",
    "fedkeel.features.attackers.declaration:AttackersDeclaration",
    "fedkeel.features.budget.declaration:PrivacyDeclaration",
    "fedkeel.features.secure.declaration:SecureSumsDeclaration",
    "fedkeel.features.stop.declaration:StopDeclaration",
    "fedkeel.features.personal.declaration:PersonalDeclaration",
    "fedkeel.features.networks.declaration:NetworksDeclaration",
    "fedkeel.features.track.declaration:TrackDeclaration",
    "fedkeel.features.diagnose.declaration:DiagnoseDeclaration",
)
"""Import path of the declaration of each feature, in the order in which they wrap a run."""
